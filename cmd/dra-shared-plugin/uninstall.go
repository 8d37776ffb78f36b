// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/dra-shared/dra-driver-shared/api"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/restconfig"
)

// newUninstallCheckCommand returns the command that Helm runs before it removes the chart. Without a plugin, the
// kubelet cannot unprepare claims, and their pods stay Terminating. Without a controller, claims stay reserved for
// objects other than pods, and pods stay behind the scheduling gate.
func newUninstallCheckCommand() *cobra.Command {
	var driver, kubeconfig string
	c := &cobra.Command{
		Use:   "uninstall-check",
		Short: "Fail while claims hold shares, PodGroups exist, or pods or claims need the controller",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rest, err := restconfig.Load(kubeconfig)
			if err != nil {
				return err
			}
			client, err := kubernetes.NewForConfig(rest)
			if err != nil {
				return err
			}
			objects, err := metadata.NewForConfig(rest)
			if err != nil {
				return err
			}
			return errors.Join(checkUninstall(cmd.Context(), client, driver), checkGroups(cmd.Context(), objects))
		},
	}
	c.Flags().StringVar(&driver, "driver-name", api.DriverName, "name of the driver")
	c.Flags().StringVar(&kubeconfig, "kubeconfig", "", "path of a kubeconfig file; default: the pod's service account")
	return c
}

// maxListed is the number of names that a message lists.
const maxListed = 10

// checkUninstall returns an error while reserved claims hold shares, while the controller holds claims for other
// objects, and while pods wait for the controller.
func checkUninstall(ctx context.Context, client kubernetes.Interface, driver string) error {
	claims, err := client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list ResourceClaims: %w", err)
	}
	return errors.Join(checkShares(claims.Items, driver), checkHolders(claims.Items), checkGates(ctx, client))
}

// checkShares returns an error while reserved claims hold shares.
func checkShares(claims []resourceapi.ResourceClaim, driver string) error {
	var held []string
	for _, c := range claims {
		if len(c.Status.ReservedFor) > 0 && hasShare(c, driver) {
			held = append(held, c.Namespace+"/"+c.Name)
		}
	}
	if len(held) == 0 {
		return nil
	}
	return fmt.Errorf("claims hold shares: %s: delete their pods first, or they stay Terminating until the driver is "+
		"installed again; helm uninstall --no-hooks skips this check", listed(held))
}

// checkHolders returns an error while the controller holds claims for objects other than pods. The claims may be on
// other drivers' devices. Only the controller removes these objects' entries.
func checkHolders(claims []resourceapi.ResourceClaim) error {
	var held []string
	for _, c := range claims {
		for _, e := range c.Status.ReservedFor {
			if isHeldByController(c, e) {
				kind := schema.GroupResource{Group: e.APIGroup, Resource: e.Resource}
				held = append(held, fmt.Sprintf("%s/%s for %s %s", c.Namespace, c.Name, kind, e.Name))
				break
			}
		}
	}
	if len(held) == 0 {
		return nil
	}
	return fmt.Errorf("the controller holds claims for other objects: %s: delete these objects or the claims first, and "+
		"the pods that use them, or the claims stay reserved until the driver is installed again; "+
		"helm uninstall --no-hooks skips this check", listed(held))
}

// isHeldByController reports whether only the controller removes a claim's entry. The controller adds entries for
// owners to claims that it has generated, and for holders to claims with the annotation reserved-for. All other
// entries that it adds have its PodGroups' API group. Kubernetes removes entries for its own PodGroups.
func isHeldByController(c resourceapi.ResourceClaim, entry resourceapi.ResourceClaimConsumerReference) bool {
	if claimref.IsPodEntry(entry) || entry.APIGroup == schedulingapi.GroupName {
		return false
	}
	return entry.APIGroup == scheduling.GroupName || metav1.HasAnnotation(c.ObjectMeta, scheduling.ClaimAnnotation) ||
		metav1.HasAnnotation(c.ObjectMeta, scheduling.ReservedForAnnotation)
}

// checkGates returns an error while pods are behind the scheduling gate that only the controller removes.
func checkGates(ctx context.Context, client kubernetes.Interface) error {
	// All pods with the gate have the label.
	pods, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		LabelSelector: scheduling.GroupUIDLabel, FieldSelector: "status.phase=" + string(corev1.PodPending),
	})
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	var waiting []string
	for _, p := range pods.Items {
		if slices.Contains(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: scheduling.ReservedGate}) {
			waiting = append(waiting, p.Namespace+"/"+p.Name)
		}
	}
	if len(waiting) == 0 {
		return nil
	}
	return fmt.Errorf("pods wait for the controller to remove the scheduling gate %s: %s: delete them first, or they "+
		"stay Pending until the driver is installed again; helm uninstall --no-hooks skips this check",
		scheduling.ReservedGate, listed(waiting))
}

// listed returns the first names, and their number.
func listed(names []string) string {
	return fmt.Sprintf("%s (%d in total)", strings.Join(names[:min(len(names), maxListed)], ", "), len(names))
}

// checkGroups returns an error while PodGroups exist. Only the controller releases
// their claims and removes their finalizer.
func checkGroups(ctx context.Context, client metadata.Interface) error {
	groups, err := client.Resource(scheduling.GroupVersion.WithResource(scheduling.Resource)).
		List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) || err == nil && len(groups.Items) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list PodGroups: %w", err)
	}
	var names []string
	for _, g := range groups.Items {
		names = append(names, g.Namespace+"/"+g.Name)
	}
	return fmt.Errorf(
		"PodGroups exist: %s: delete them and their pods first (kubectl delete podgroups.%s -n NAMESPACE NAME), "+
			"or their claims stay reserved until the driver is installed again; helm uninstall --no-hooks skips this check",
		listed(names), scheduling.GroupName)
}

// hasShare reports whether a claim is allocated a device of the driver.
func hasShare(c resourceapi.ResourceClaim, driver string) bool {
	if c.Status.Allocation == nil {
		return false
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver == driver {
			return true
		}
	}
	return false
}
